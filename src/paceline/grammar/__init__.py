"""Structured output: which tokens may come next by a JSON schema, a regular expression, a grammar or a list of texts.

Nothing here imports the library that parses (llguidance) before a request asks for a structure.
"""
