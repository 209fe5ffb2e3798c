"""Holds what all our HTTP servers share, access checks (`guard`) and connection handling (`web_server`), the
client for HTTP services (`http_calls`), and a check of the Hugging Face hub (`hub_access`)."""
