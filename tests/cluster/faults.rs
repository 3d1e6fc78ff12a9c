//! All known faults of a single master of a cluster.

use std::time::Duration;

use crate::matrix::{self, Fault};
use crate::proxy::Mode;

rows!(tests);
