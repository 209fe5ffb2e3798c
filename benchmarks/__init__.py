"""The lab beside the package: what it measures is in its pages, and nobody who installs Penstock needs it."""
