"""Every connection is an open file, and systems allow few of them unless asked."""

import resource

ENOUGH = 65_536


def allow_many_connections() -> None:
    """As many open files as this process may allow itself, up to what a server can use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
