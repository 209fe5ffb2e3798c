import resource

from penstock.open_files import ENOUGH, allow_many_connections


def test_a_process_allows_itself_as_many_files_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(ENOUGH, hard if hard > 0 else ENOUGH)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
