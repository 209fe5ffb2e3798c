"""SGLang's servers as engines. Written from SGLang's documentation and tested against a fake of it: never run on a
real server so far."""
