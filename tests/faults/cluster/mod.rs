//! All known faults of a single master of a cluster.

#[macro_use]
mod matrix;

use std::time::Duration;

use matrix::Fault;

use crate::proxy::Mode;

rows!(tests);
