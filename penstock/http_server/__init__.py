"""What all our HTTP servers share: who may ask (`guard`), and connections that must say what they want
(`web_server`)."""
