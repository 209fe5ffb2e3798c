from penstock.sync.ipc_handle import Handle


def test_a_handle_survives_its_way_as_text() -> None:
    handle = Handle(
        size=12,
        offset=512,
        counter_offset=7,
        waits=True,
        memory=b"\x00:\xff",
        counter=b"/torch_1:2",
        event=b"",
    )
    assert Handle.decode(handle.encode()) == handle
