//! The deadline of a gRPC call, beyond which no request waits.

use std::time::Duration;

use http::request::Parts;

/// Maximum number of digits of a timeout, by gRPC's protocol.
const DIGITS: usize = 8;

/// Returns the time in `grpc-timeout`, such as `200m`. `None` if it is absent or malformed.
pub(super) fn grpc_timeout(request: &Parts) -> Option<Duration> {
    let text = request.headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    // A parsed number may have a sign.
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number || digits.len() > DIGITS {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3_600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}
