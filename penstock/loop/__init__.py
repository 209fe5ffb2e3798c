"""The heart: admission, the buffer, production of groups, steps, weight sync. It knows records and protocols."""
