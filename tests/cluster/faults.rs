//! Every way that we know of in which one master of a cluster goes away.

use std::time::Duration;

use crate::matrix::{Fault, run};
use crate::proxy::Mode;

macro_rules! tests {
    ($($test:ident: $name:literal => $fault:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            println!("{}: {:?}", $name, run($fault).await);
        }
    )*};
}

rows!(tests);
