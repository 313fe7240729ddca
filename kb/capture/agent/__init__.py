"""The code that runs on a node: sent over stdin as one text, it needs only Python 3.8 and no other part of kb."""
