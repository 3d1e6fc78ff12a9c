//! Every way that we know of in which one master of a cluster goes away.

use std::time::Duration;

use crate::matrix::{self, Fault};
use crate::proxy::Mode;

rows!(tests);
