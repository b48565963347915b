"""The options of the tests; what they share is in common.py, which takes seconds to import."""

import logging

# with tests of many seconds
LONGEST = "test_cuda_graph.py", "test_tensor_parallel.py", "test_long_context.py", "test_cli.py"


def pytest_addoption(parser):
    parser.addoption("--stress-seconds", type=float, default=0.4, help="duration of each stress test of callers")
    parser.addoption(
        "--interrupts", type=int, default=6, help="number of moments at which each test of interrupts raises one"
    )
    parser.addoption("--schemas", type=int, default=24, help="number of random schemas of structured outputs")
    parser.addoption("--requests", type=int, default=500, help="number of requests in each test that nothing grows")


def pytest_configure(config):
    """The process that only hands tests to others does without PyTorch."""
    if config.getoption("dist") == "no" or config.getoption("collectonly"):
        config.pluginmanager.import_plugin("common")


def pytest_collection_modifyitems(items):
    """The longest come first: a process keeps its last two tests, while one that has none waits for it."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    """Else pytest gives each of PyTorch's forty loggers its handlers six times a test."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
