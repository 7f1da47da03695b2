"""``python -m tests.gpu_rules.template cuda|shared SOCKET``: a pool's template that has fakes, from before torch on."""

import importlib
import socket
import sys

if __name__ == "__main__":
    importlib.import_module(f"tests.gpu_rules.{sys.argv[1]}")
    importlib.import_module("tests.helpers.pool").serve_forks(socket.socket(fileno=int(sys.argv[2])))
