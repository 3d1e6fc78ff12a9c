//! `examples/remote_store.rs` as it runs.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use support::Example;

#[test]
fn instances_share_the_table() {
    let output = Example::command("remote_store").output().unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "of 40 concurrent orders 10 are granted\n\
         message-7: 6 remain\n\
         message-7: 6 remain\n\
         message-7: 6 remain\n\
         a second upload is denied: true\n\
         after the first one has ended, it is allowed\n"
    );
}
