"""The tile that a product gets on an H100 or H200, which needs no GPU to be asked."""

import subprocess

import sanitizer

# {products, m, n, k: rows of the tile, 0 for the kernel of few rows}: the fastest of those measured on an H200.
FASTEST = {
    (1, 4, 4096, 14336): 0,
    (1, 8, 28672, 4096): 0,
    (1, 16, 4096, 4096): 0,
    (1, 16, 14336, 4096): 64,
    (1, 20, 4096, 4096): 64,
    (1, 64, 14336, 4096): 64,
    (1, 256, 4096, 4096): 64,
    (1, 1024, 1024, 1024): 64,
    (1, 512, 4096, 4096): 128,
    (1, 2048, 1024, 4096): 128,
    (1, 1024, 4096, 4096): 256,
    (1, 2048, 4096, 4096): 256,
    (1, 8192, 4096, 4096): 256,
    (32, 64, 1024, 2048): 64,
    (70000, 4, 16, 16): 0,
    (70000, 12, 16, 16): 64,
}


def test_products_get_the_tile_that_was_fastest(tmp_path):
    program = sanitizer.built(tmp_path, "tests/native/tiles_main.cc", name="undefined")
    lines = "".join(f"{' '.join(map(str, sizes))}\n" for sizes in FASTEST)
    done = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
    assert dict(zip(FASTEST, map(int, done.stdout.split()), strict=True)) == FASTEST
