"""What all our HTTP servers share: who may ask (`guard`), connections that must say what they want
(`web_server`), and asking services of others (`http_calls`)."""
