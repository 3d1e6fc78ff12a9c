//! All known faults of a single master of a cluster.

#[macro_use]
mod matrix;

use std::time::Duration;

use crate::fault::Fault;
use crate::proxy::Mode;

rows!(tests);
