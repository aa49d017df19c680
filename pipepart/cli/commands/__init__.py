"""The commands, one a file.

A command's file imports only what parses its options. What needs torch is imported inside the function, so that
``--help`` and wrong options are answered at once.
"""
