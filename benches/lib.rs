//! Nothing but benches: see `CONTRIBUTING.md`.
