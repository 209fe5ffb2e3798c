"""The journal is an append-only log of what happens to groups, and is the truth after any crash.

segment-00000001.journal   header, then frames; a frame is one commit: some records and a checksum
base.journal               what is known of segments that were removed
"""
