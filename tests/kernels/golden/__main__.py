from tests.kernels.golden import write

write()
