"""One engine behind several processes that speak HTTP: see `fronts` in ../README.md."""
