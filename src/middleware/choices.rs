//! The choices of a layer as text.

use super::{OnError, OnMissingKey};
use crate::limit::words;

words!(OnError, "answer to an error", "`reject` or `allow`": Reject = "reject", Allow = "allow");
words!(OnMissingKey, "answer to a missing key", "`reject` or `allow`": Reject = "reject", Allow = "allow");
