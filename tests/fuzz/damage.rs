//! Damages bytes, as a bug, an attacker or another version might.

use fastrand::Rng;

/// Separators and limits of number ranges, in the formats that the crate reads.
const TOKENS: &[&str] = &[
    "0",
    "-1",
    "1",
    "9007199254740993",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551616",
    "1e308",
    "nan",
    "",
    " ",
    "\t",
    "\r\n",
    "\0",
    "/",
    ":",
    ";",
    ",",
    "=",
    "\"",
    "\\",
    "[",
    "]",
    "::",
    "%",
    "?",
    "@",
    "#",
    "$-1\r\n",
    "*-1\r\n",
    "*0\r\n",
    "*1000000\r\n",
    "$1000000\r\n",
    "-ERR x\r\n",
    "-MOVED 1 :0\r\n",
    "-ASK 1 a:1\r\n",
    ":1\r\n",
    "+OK\r\n",
    "_\r\n",
    "é",
    "\u{7f}",
];

/// Makes one to four changes: replaces, removes, duplicates or inserts bytes.
pub(crate) fn damage(rng: &mut Rng, valid: &[u8]) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    for _ in 0..rng.usize(1..=4) {
        let from = rng.usize(0..=bytes.len());
        let to = (from + rng.usize(0..=8)).min(bytes.len());
        match rng.u8(0..6) {
            0 => drop(bytes.drain(from..to)),
            1 => bytes.truncate(from),
            2 => drop(bytes.splice(from..from, bytes[from..to].to_vec())),
            3 => bytes[from..to].fill_with(|| rng.u8(..)),
            4 => drop(bytes.splice(
                from..to,
                rng.choice(TOKENS).copied().unwrap_or_default().bytes(),
            )),
            _ => replace_number(rng, &mut bytes, from),
        }
    }
    bytes
}

/// Replaces the next number.
fn replace_number(rng: &mut Rng, bytes: &mut Vec<u8>, from: usize) {
    let digits = |byte: &u8| byte.is_ascii_digit();
    let Some(start) = bytes[from..]
        .iter()
        .position(digits)
        .map(|place| from + place)
    else {
        return;
    };
    let length = bytes[start..]
        .iter()
        .take_while(|byte| digits(byte))
        .count();
    let number = match rng.bool() {
        true => rng
            .choice(&TOKENS[..9])
            .copied()
            .unwrap_or_default()
            .to_owned(),
        false => (rng.u64(..) >> rng.u32(0..64)).to_string(),
    };
    bytes.splice(start..start + length, number.bytes());
}
