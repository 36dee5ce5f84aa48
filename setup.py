"""The one thing pyproject.toml cannot say: native kernels, optional. Without a compiler the package installs and numpy does their work."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "driftline.policy_store._native",
            sources=["policy_store/native.c"],
            depends=["policy_store/native_scan.h", "policy_store/native_ranked.h"],
            extra_compile_args=["-O3", "-std=gnu11", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
