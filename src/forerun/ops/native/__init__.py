"""CPU kernels in C++ whose result for a row never depends on the rows beside it; each has a torch twin in `ops`."""
