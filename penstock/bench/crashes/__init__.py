"""Runs that crash, in virtual time: what the tests of the journal and `penstock bench journal` play and audit."""
