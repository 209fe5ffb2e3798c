"""What a model might say to whoever shows its words."""

HOSTILE = (
    "<script>document.title='pwned'</script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    "</pre></style><svg/onload=alert(1)>",
    "\x1b[2J\x1b]0;pwned\x07",
    "[bold red]markup[/] &lt;b&gt; \u202eевил\u2066",
    "javascript:alert(1)",
    "half \ud800",
    '"><a href="http://evil.example/">x</a>',
)
