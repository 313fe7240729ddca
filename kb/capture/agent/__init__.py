"""What runs on a node: Python 3.8 and the standard library, sent as one text over stdin; imports nothing else of kb."""
