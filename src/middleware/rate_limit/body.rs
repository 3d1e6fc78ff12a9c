use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::settle::RequestCost;

pin_project! {
    /// A response body whose end settles the request's charge: see
    /// [`SettledLayer`](crate::rate_limit::SettledLayer).
    ///
    /// It passes on the frames of the inner service's body. It ends with the last frame, with
    /// trailers, with an error, or when it is dropped. At its end it drops the inner body.
    pub struct TrackedBody<B> {
        // `None` after the end.
        #[pin]
        inner: Option<B>,
        // `None` after the end, or if there is nothing to settle.
        charge: Option<RequestCost>,
    }
}

impl<B> TrackedBody<B> {
    pub(super) fn new(inner: B, charge: Option<RequestCost>) -> Self {
        Self {
            inner: Some(inner),
            charge,
        }
    }
}

impl<B: Body> Body for TrackedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        let Some(mut inner) = this.inner.as_mut().as_pin_mut() else {
            return Poll::Ready(None);
        };
        let frame = ready!(inner.as_mut().poll_frame(cx));
        if let (Some(Ok(frame)), Some(charge)) = (&frame, &this.charge)
            && let Some(data) = frame.data_ref()
        {
            charge.charges().sent(data.remaining());
        }
        let is_end = match &frame {
            Some(Ok(frame)) => frame.is_trailers() || inner.is_end_stream(),
            Some(Err(_)) | None => true,
        };
        if is_end {
            // Drop the body too, which may have a clone of the charge: a server drops it after the client has the end, and
            // the client's next request would overtake the release.
            this.inner.set(None);
            *this.charge = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let inner = self.inner.as_ref();
        inner.map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

/// An uncounted body, for the responses of other layers.
impl<B: From<String>> From<String> for TrackedBody<B> {
    fn from(text: String) -> Self {
        Self::new(text.into(), None)
    }
}

/// An uncounted body.
impl<B: Default> Default for TrackedBody<B> {
    fn default() -> Self {
        Self::new(B::default(), None)
    }
}

impl<B: fmt::Debug> fmt::Debug for TrackedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrackedBody")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
