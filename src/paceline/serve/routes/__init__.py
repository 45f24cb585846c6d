"""Other protocols than chat completions, one file or two for each: what comes is translated to the body of a chat or of
a completion, goes the way of all those, and what comes back is told in the protocol's own words."""
