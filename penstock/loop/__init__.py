"""Holds the heart of the library: admission, the buffer, production of groups, steps and weight sync. It imports
only records and protocols."""
