"""Holds what all our HTTP servers share, access checks (`guard`) and connection handling (`web_server`), and the
client for HTTP services (`http_calls`)."""
