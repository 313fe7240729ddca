"""What is to be known of this machine, one noun per module; `kb.environment` puts it together.

`survey.py` and `reading.py` also run in the reader's interpreter: standard library and Python 3.9.
"""
