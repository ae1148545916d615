//! The checksums that a client may send with an object, before it (headers) or after it (trailers): all are verified.

use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::PutObjectInput;
use s3s::{S3Request, S3Result, s3_error};

const ALGORITHMS: [&str; 5] = ["crc32", "crc32c", "crc64nvme", "sha1", "sha256"];

/// What is computed over an object's bytes, and what must come out.
pub(super) struct Expected {
    hasher: ChecksumHasher,
    md5: Option<(Md5, String)>,
    /// By the places in [`ALGORITHMS`].
    wanted: [Option<String>; 5],
}

impl Expected {
    /// Looks through the request for every checksum it has or announces.
    pub(super) fn of(request: &S3Request<PutObjectInput>) -> S3Result<Self> {
        let input = &request.input;
        let wanted = [
            input.checksum_crc32.clone(),
            input.checksum_crc32c.clone(),
            input.checksum_crc64nvme.clone(),
            input.checksum_sha1.clone(),
            input.checksum_sha256.clone(),
        ];
        let announced = request.headers.get("x-amz-trailer").map(|names| names.to_str().unwrap_or_default());
        let announced: Vec<String> = announced
            .unwrap_or_default()
            .split(',')
            .filter_map(|name| name.trim().to_ascii_lowercase().strip_prefix("x-amz-checksum-").map(str::to_owned))
            .collect();
        if let Some(unknown) = announced.iter().find(|name| !ALGORITHMS.contains(&name.as_str())) {
            return Err(s3_error!(NotImplemented, "checksum {unknown} is not implemented"));
        }
        let mut hasher = ChecksumHasher::default();
        for (algorithm, wanted) in ALGORITHMS.iter().zip(&wanted) {
            if wanted.is_none() && !announced.iter().any(|name| name == algorithm) {
                continue;
            }
            match *algorithm {
                "crc32" => hasher.crc32 = Some(Default::default()),
                "crc32c" => hasher.crc32c = Some(Default::default()),
                "crc64nvme" => hasher.crc64nvme = Some(Default::default()),
                "sha1" => hasher.sha1 = Some(Default::default()),
                _ => hasher.sha256 = Some(Default::default()),
            }
        }
        let md5 = input.content_md5.clone().map(|wanted| (Md5::new(), wanted));
        Ok(Self { hasher, md5, wanted })
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        if let Some((md5, _)) = &mut self.md5 {
            md5.update(bytes);
        }
    }

    /// Compares, once the body has been read to its end.
    pub(super) fn verify(mut self, request: &S3Request<PutObjectInput>) -> S3Result<()> {
        if let Some(trailers) = request.trailing_headers.as_ref().and_then(|trailers| trailers.take()) {
            for (algorithm, wanted) in ALGORITHMS.iter().zip(&mut self.wanted) {
                if let Some(value) = trailers.get(format!("x-amz-checksum-{algorithm}")) {
                    *wanted = Some(value.to_str().unwrap_or_default().to_owned());
                }
            }
        }
        let sums = self.hasher.finalize();
        let computed = [
            sums.checksum_crc32,
            sums.checksum_crc32c,
            sums.checksum_crc64nvme,
            sums.checksum_sha1,
            sums.checksum_sha256,
        ];
        for ((algorithm, wanted), computed) in ALGORITHMS.iter().zip(self.wanted).zip(computed) {
            // An announced trailer that did not come is a mismatch too.
            if wanted != computed {
                return Err(s3_error!(
                    BadDigest,
                    "the body's {algorithm} is {computed:?}, the request says {wanted:?}"
                ));
            }
        }
        if let Some((md5, wanted)) = self.md5 {
            let computed = base64(md5.finalize().as_ref());
            if computed != wanted {
                return Err(s3_error!(BadDigest, "the body's MD5 is {computed}, the request says {wanted}"));
            }
        }
        Ok(())
    }
}

/// Standard base64 with padding (RFC 4648, section 4): of a digest, so not worth a dependency.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, byte| (bits << 8) | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let digit = usize::try_from((bits >> (18 - 6 * place)) & 63).expect("six bits");
            text.push(if place <= group.len() { char::from(DIGITS[digit]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 4648, section 10.
    #[test]
    fn base64_of_the_rfc() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
