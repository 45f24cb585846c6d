"""What the engine and device backends share: the protocol, the rows of a step and the seats' tables on the device."""
