"""A run as a page to send to somebody: `RUN/report.html`."""
