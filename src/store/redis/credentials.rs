//! Credentials that change while a store runs: from a closure of the application, or from a password file.

use std::fmt;
use std::fs::File;
use std::future::Future;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use tokio::sync::oneshot;

use crate::error::{ErrorKind, StoreError, redacted};
use crate::util::lock;

type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// The user and password of a Redis, for [`RedisStoreBuilder::credentials`](crate::store::RedisStoreBuilder::credentials).
///
/// `Debug` shows the user, but no password.
#[derive(Clone)]
pub struct Credentials {
    user: String,
    password: String,
    valid_for: Option<Duration>,
}

impl Credentials {
    /// Creates credentials. An empty user is Redis's default user.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self {
            user: user.into(),
            password: password.into(),
            valid_for: None,
        }
    }

    /// Sets the time for which new connections may use these credentials, from the call of the closure on. When a fifth of
    /// it is left, but at least a second after the call, the closure is called again. Without it, the closure is called for
    /// each connection.
    #[must_use]
    pub fn valid_for(self, time: Duration) -> Self {
        Self {
            valid_for: Some(time),
            ..self
        }
    }

    pub(super) fn user(&self) -> &str {
        &self.user
    }

    pub(super) fn password(&self) -> &str {
        &self.password
    }

    pub(super) fn validity(&self) -> Option<Duration> {
        self.valid_for
    }

    /// Returns `true` if a server cannot tell the two apart.
    pub(super) fn log_in_as(&self, other: &Self) -> bool {
        (&self.user, &self.password) == (&other.user, &other.password)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("user", &self.user)
            .field("valid_for", &self.valid_for)
            .finish_non_exhaustive()
    }
}

type Closure = dyn Fn() -> BoxFuture<'static, Result<Credentials, SourceError>> + Send + Sync;

/// Where the credentials of a store come from.
#[derive(Clone)]
pub(super) enum CredentialSource {
    Closure(Arc<Closure>),
    /// A file with the password. The user is that of the URL.
    File(Arc<PasswordFile>),
}

/// A file on a file system that may hang. So it is read on a separate thread, for which no runtime waits when it shuts
/// down, and at most one at a time: all calls in the meantime share the read.
pub(super) struct PasswordFile {
    path: PathBuf,
    running: Mutex<Option<PasswordRead>>,
}

/// Resolves to the password, or to the problem of its file.
type PasswordRead = Shared<oneshot::Receiver<Result<String, String>>>;

impl CredentialSource {
    pub(super) fn closure<F, Fut>(provider: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, SourceError>> + Send + 'static,
    {
        Self::Closure(Arc::new(move || provider().boxed()))
    }

    pub(super) fn file(path: impl Into<PathBuf>) -> Self {
        Self::File(Arc::new(PasswordFile {
            path: path.into(),
            running: Mutex::default(),
        }))
    }

    /// Calls the closure or reads the file. `user` is the user of the file's password.
    pub(super) async fn get(&self, user: &str) -> Result<Credentials, StoreError> {
        let credentials = match self {
            Self::Closure(closure) => closure().await.map_err(failed)?,
            Self::File(file) => match file.read().await {
                Ok(password) => Credentials::new(user, password),
                Err(problem) => return Err(unreadable(problem)),
            },
        };
        if credentials.password.is_empty() {
            return Err(failed("the password is empty".into()));
        }
        Ok(credentials)
    }

    /// The error of a source that takes too long.
    pub(super) fn late(&self) -> StoreError {
        match self {
            Self::Closure(_) => StoreError::new(ErrorKind::Authentication).with_message(
                "the closure of `RedisStoreBuilder::credentials` took longer than three quarters of `connect_timeout` for \
                 the server: make it faster, or raise `connect_timeout`",
            ),
            Self::File(file) => unreadable(format!(
                "the file {} did not open or end in time: use the path of a regular file, or check its file system",
                shown(&file.path)
            )),
        }
    }

    /// The error of a source that has panicked.
    pub(super) fn panicked() -> StoreError {
        failed("it panicked".into())
    }
}

/// Shows neither a password nor what the closure contains.
impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closure(_) => f.write_str("closure"),
            Self::File(file) => f.write_str(&shown(&file.path)),
        }
    }
}

/// The error of a closure. Its cause is the closure's own error.
fn failed(cause: SourceError) -> StoreError {
    StoreError::with_boxed_source(ErrorKind::Authentication, cause).with_message(
        "the closure of `RedisStoreBuilder::credentials` has failed for the server: fix the cause, which this error names",
    )
}

fn unreadable(problem: String) -> StoreError {
    StoreError::explained(ErrorKind::Authentication, problem)
        .with_message("the password of the server cannot be read: ")
}

impl PasswordFile {
    async fn read(self: &Arc<Self>) -> Result<String, String> {
        match self.begin() {
            Ok(read) => match read.await {
                Ok(password) => password,
                Err(error) => Err(error.to_string()),
            },
            Err(error) => Err(error.to_string()),
        }
    }

    /// Joins the running read, or starts one.
    fn begin(self: &Arc<Self>) -> io::Result<PasswordRead> {
        let mut running = lock(&self.running);
        if let Some(read) = &*running {
            return Ok(read.clone());
        }
        let (sender, read) = oneshot::channel();
        let read = read.shared();
        let file = Arc::clone(self);
        thread::Builder::new()
            .name("redis-password".to_owned())
            .spawn(move || {
                let password = read_password(&file.path);
                *lock(&file.running) = None;
                // Fails if all waiters have been dropped.
                let _ = sender.send(password);
            })?;
        *running = Some(read.clone());
        Ok(read)
    }
}

/// Maximum size of a password file.
const MAX_SIZE: u64 = 64 * 1024;

/// Reads the password in a file, without one newline at its end.
fn read_password(path: &Path) -> Result<String, String> {
    let wrong = |problem: &str| format!("the file {} {problem}", shown(path));
    let bytes = match read(path) {
        Ok(bytes) => bytes,
        Err(error) => {
            let fix = "use the path of a file that this process may read";
            return Err(wrong(&format!("is missing or unreadable ({error}): {fix}")));
        }
    };
    if bytes.len() as u64 > MAX_SIZE {
        return Err(wrong(
            "is longer than 64 KiB: use the path of a file with the password alone",
        ));
    }
    let Ok(text) = String::from_utf8(bytes) else {
        return Err(wrong("is not UTF-8: write the password as text"));
    };
    let password = text.strip_suffix('\n').unwrap_or(&text);
    // An editor on Windows ends the line with both.
    let password = password.strip_suffix('\r').unwrap_or(password);
    if password.is_empty() {
        return Err(wrong("is empty: write the password into it"));
    }
    Ok(password.to_owned())
}

/// Reads a file, up to one byte more than it may have.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    // A byte more shows that the file is too long. A device may never end.
    File::open(path)?
        .take(MAX_SIZE + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Formats a path, which may be a password by mistake.
fn shown(path: &Path) -> String {
    format!("{:?}", redacted(&path.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn one_newline_is_no_part_of_a_password() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        for (content, password) in [
            ("hunter2", "hunter2"),
            ("hunter2\n", "hunter2"),
            ("hunter2\r\n", "hunter2"),
            ("hunter2\n\n", "hunter2\n"),
            (" hunter2 ", " hunter2 "),
        ] {
            fs::write(&path, content).unwrap();
            assert_eq!(read_password(&path).unwrap(), password, "{content:?}");
        }
        fs::write(&path, "a".repeat(MAX_SIZE as usize)).unwrap();
        assert_eq!(read_password(&path).unwrap().len() as u64, MAX_SIZE);
    }

    /// No error has the content of the file.
    #[test]
    fn a_wrong_password_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        let named = format!("the file {path:?} ");
        let mut too_long = b"hunter2".repeat(MAX_SIZE as usize / 7);
        too_long.push(b'\n');
        too_long.extend(b"hunter2");
        for (content, problem) in [
            (&b""[..], "is empty: write"),
            (b"\n", "is empty: write"),
            (b"hunter2\xff", "is not UTF-8: write"),
            (&too_long, "is longer than 64 KiB: use"),
        ] {
            fs::write(&path, content).unwrap();
            let error = read_password(&path).unwrap_err();
            assert!(error.starts_with(&named), "{error}");
            assert!(error.contains(problem), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        fs::remove_file(&path).unwrap();
        let error = read_password(&path).unwrap_err();
        assert!(error.contains("is missing or unreadable ("), "{error}");
        fs::create_dir(&path).unwrap();
        let error = read_password(&path).unwrap_err();
        assert!(error.contains("is missing or unreadable ("), "{error}");
    }

    #[test]
    fn debug_shows_no_password() {
        let credentials = Credentials::new("limiter", "hunter2").valid_for(Duration::from_secs(3));
        let source =
            CredentialSource::closure(|| async { Ok(Credentials::new("limiter", "hunter2")) });
        let text = format!("{credentials:?} {source:?}");
        assert_eq!(
            text,
            "Credentials { user: \"limiter\", valid_for: Some(3s), .. } closure"
        );
    }
}
