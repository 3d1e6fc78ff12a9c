//! The part of `rocksdb` that limitador's disk storage needs to compile. No database can be opened.

use std::convert::Infallible;
use std::fmt::{Display, Formatter, Result as FmtResult};
use std::iter::Empty;
use std::marker::PhantomData;
use std::path::Path;

pub type DB = DBWithThreadMode<MultiThreaded>;

/// No value exists.
pub struct DBWithThreadMode<T> {
    never: Infallible,
    mode: PhantomData<T>,
}

pub struct MultiThreaded;

type Entry = Result<(Box<[u8]>, Box<[u8]>), Error>;

impl<T> DBWithThreadMode<T> {
    pub fn open(_: &Options, _: impl AsRef<Path>) -> Result<Self, Error> {
        Err(Error)
    }

    pub fn get(&self, _: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>, Error> {
        match self.never {}
    }

    pub fn merge(&self, _: impl AsRef<[u8]>, _: impl AsRef<[u8]>) -> Result<(), Error> {
        match self.never {}
    }

    pub fn delete(&self, _: impl AsRef<[u8]>) -> Result<(), Error> {
        match self.never {}
    }

    pub fn iterator(&self, _: IteratorMode) -> Empty<Entry> {
        match self.never {}
    }

    pub fn prefix_iterator(&self, _: impl AsRef<[u8]>) -> Empty<Entry> {
        match self.never {}
    }
}

#[derive(Default)]
pub struct Options;

impl Options {
    pub fn create_if_missing(&mut self, _: bool) {}

    pub fn set_compression_type(&mut self, _: DBCompressionType) {}

    pub fn set_compaction_filter(
        &mut self,
        _: &str,
        _: impl FnMut(u32, &[u8], &[u8]) -> CompactionDecision,
    ) {
    }

    pub fn set_merge_operator_associative(
        &mut self,
        _: &str,
        _: impl Fn(&[u8], Option<&[u8]>, &MergeOperands) -> Option<Vec<u8>>,
    ) {
    }
}

pub struct MergeOperands {
    never: Infallible,
}

impl<'a> IntoIterator for &'a MergeOperands {
    type Item = &'a [u8];
    type IntoIter = Empty<&'a [u8]>;

    fn into_iter(self) -> Self::IntoIter {
        match self.never {}
    }
}

pub enum DBCompressionType {
    Bz2,
    None,
}

pub enum CompactionDecision {
    Keep,
    Remove,
}

pub enum IteratorMode {
    Start,
}

#[derive(PartialEq, Eq)]
pub enum ErrorKind {
    InvalidArgument,
    TimedOut,
    TryAgain,
}

#[derive(Debug)]
pub struct Error;

impl Error {
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::InvalidArgument
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        f.write_str("this is not RocksDB")
    }
}

impl std::error::Error for Error {}
