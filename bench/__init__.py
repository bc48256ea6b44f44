"""How fast busload is, beside what the machine allows and what its peers do: `make bench`, or `python -m bench`."""
