"""Holds the heart of the library: admission, the buffer, production of groups, steps and weight sync. It starts
no process and opens no file."""
