//! Loaded into a VMM (`LD_PRELOAD`): makes its guest memory private and lazily served.
//!
//! The VMM is told to map a file as shared guest memory. This library recognises that mapping by the file's device and
//! inode and puts private anonymous memory in its place, which the VMM cannot tell from the outside: it leaves memory out
//! of the saved device state, and no other process sees what its guest writes. On command the mapping is replaced by a
//! private mapping of a memory image, registered with a userfaultfd. `vmm/src/preload.rs` describes the channel.
//!
//! ```text
//!   loaded ──mmap of the placeholder──▶ anonymous ──attach──▶ inaccessible ──registered──▶ served ──attach──▶ …
//!                                                                  └──failed──▶ inaccessible for ever: touching it
//!                                                                               kills the VMM
//! ```
//!
//! Invariants:
//! - Memory that belongs to an image is accessible only while it is registered. A hole of the image would otherwise read
//!   as zeros, and put a zero page into the image that others share.
//! - The userfaultfd stays open here as long as its mapping exists: when its last descriptor closes, holes read as zeros.
//! - In the hook: no allocation, no lock, no panic. It runs in whatever state the VMM is in.
//! - Without its environment variable the library does nothing.

use core::ffi::{c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

mod abi;
mod control;

/// The control channel's descriptor, or -1.
static CONTROL: AtomicI32 = AtomicI32::new(-1);
/// An open `/dev/userfaultfd`, or -1.
static UFFD_DEVICE: AtomicI32 = AtomicI32::new(-1);
/// Device and inode of the placeholder.
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);
/// Whether the variables above are set.
static ARMED: AtomicBool = AtomicBool::new(false);
/// Whether the control thread was started.
static STARTED: AtomicBool = AtomicBool::new(false);

/// More mappings of guest memory than any machine has (it has one).
const MAX_REGIONS: usize = 8;
/// The mappings of guest memory; the first `REGION_COUNT` are valid.
static REGIONS: [Region; MAX_REGIONS] = [const { Region::new() }; MAX_REGIONS];
static REGION_COUNT: AtomicUsize = AtomicUsize::new(0);

/// One mapping of guest memory. Written once, before `REGION_COUNT` counts it.
struct Region {
    base: AtomicU64,
    size: AtomicU64,
    offset: AtomicU64,
}

impl Region {
    const fn new() -> Self {
        Self { base: AtomicU64::new(0), size: AtomicU64::new(0), offset: AtomicU64::new(0) }
    }

    fn base(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    fn offset(&self) -> u64 {
        self.offset.load(Ordering::Relaxed)
    }
}

fn regions() -> &'static [Region] {
    &REGIONS[..REGION_COUNT.load(Ordering::Acquire).min(MAX_REGIONS)]
}

fn errno() -> c_int {
    // SAFETY: the function gives a valid pointer to this thread's errno.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above; nobody else writes this thread's errno.
    unsafe { *place }
}

fn set_errno(value: c_int) {
    // SAFETY: the function gives a valid pointer to this thread's errno.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above; nobody else reads this thread's errno.
    unsafe { *place = value };
}

/// The dynamic linker runs this before the VMM's `main`.
// SAFETY: `.init_array` holds functions of this signature; the linker calls each once, on the only thread.
#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = init;

/// `SNAPYARD_PRELOAD=1,CONTROL,UFFD_DEVICE,LIBRARY,DEVICE,INODE`, decimal; 1 is the version of this contract. The first
/// three are inherited descriptors; the one that this library was loaded from has done its duty.
extern "C" fn init() {
    // SAFETY: the name is a C string; before `main` nobody changes the environment.
    let value = unsafe { libc::getenv(c"SNAPYARD_PRELOAD".as_ptr()) };
    if value.is_null() {
        return;
    }
    let mut fields = [0i64; 6];
    if !parse(value, &mut fields) || fields[0] != 1 {
        return;
    }
    for fd in [fields[1], fields[2]] {
        // SAFETY: sets a flag of a descriptor that was inherited for this library (or fails on -1).
        unsafe { libc::fcntl(fd as c_int, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    abi::close(fields[3] as c_int);
    CONTROL.store(fields[1] as c_int, Ordering::Relaxed);
    UFFD_DEVICE.store(fields[2] as c_int, Ordering::Relaxed);
    DEVICE.store(fields[4] as u64, Ordering::Relaxed);
    INODE.store(fields[5] as u64, Ordering::Relaxed);
    ARMED.store(true, Ordering::Release);
}

/// Reads comma-separated integers; false unless there are exactly as many as fields.
fn parse(text: *const c_char, fields: &mut [i64; 6]) -> bool {
    // SAFETY: the environment's values are C strings, which live as long as nobody changes the environment.
    let text = unsafe { core::ffi::CStr::from_ptr(text) };
    let Ok(text) = text.to_str() else { return false };
    let mut numbers = text.split(',');
    for field in fields.iter_mut() {
        let Some(Ok(number)) = numbers.next().map(str::parse) else { return false };
        *field = number;
    }
    numbers.next().is_none()
}

fn raw_mmap(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: this is the system call that the caller asked for, with its own arguments.
    let result = unsafe { libc::syscall(libc::SYS_mmap, address, len, prot, flags, fd, offset) };
    result as *mut c_void
}

/// Whether the descriptor is the placeholder for guest memory.
fn is_placeholder(fd: c_int) -> bool {
    if fd < 0 || !ARMED.load(Ordering::Acquire) {
        return false;
    }
    let mut stat = core::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call writes one stat structure into the place for one.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: the call succeeded, so the structure is filled.
    let stat = unsafe { stat.assume_init() };
    stat.st_dev == DEVICE.load(Ordering::Relaxed) && stat.st_ino == INODE.load(Ordering::Relaxed)
}

fn hook(address: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: libc::off_t) -> *mut c_void {
    if prot & libc::PROT_WRITE == 0 || !is_placeholder(fd) {
        return raw_mmap(address, len, prot, flags, fd, offset);
    }
    let count = REGION_COUNT.load(Ordering::Relaxed);
    if count >= MAX_REGIONS {
        set_errno(libc::ENOMEM);
        return libc::MAP_FAILED;
    }
    let place = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE);
    let private = place | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let mapped = raw_mmap(address, len, prot, private, -1, 0);
    if mapped == libc::MAP_FAILED {
        return mapped;
    }
    let region = &REGIONS[count];
    region.base.store(mapped as u64, Ordering::Relaxed);
    region.size.store(len as u64, Ordering::Relaxed);
    region.offset.store(offset as u64, Ordering::Relaxed);
    REGION_COUNT.store(count + 1, Ordering::Release);
    if !STARTED.swap(true, Ordering::AcqRel) && !control::start() {
        // A VMM that cannot be commanded is of no use: better that it says so at once.
        set_errno(libc::EAGAIN);
        return libc::MAP_FAILED;
    }
    mapped
}

/// `mmap(2)`, save for the mapping of guest memory.
///
/// # Safety
/// As `mmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    hook(address, len, prot, flags, fd, offset)
}

/// `mmap(2)` with a 64-bit offset, save for the mapping of guest memory.
///
/// # Safety
/// As `mmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    hook(address, len, prot, flags, fd, offset)
}

/// `madvise(2)`, save for huge pages and page merging in guest memory: with huge pages a guest that writes one page
/// would dirty five hundred, and merging would hide who owns what.
///
/// # Safety
/// As `madvise(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    let (start, end) = (address as u64, (address as u64).saturating_add(len as u64));
    let ours = regions().iter().any(|region| start < region.base() + region.size() && end > region.base());
    if ours && matches!(advice, libc::MADV_HUGEPAGE | libc::MADV_MERGEABLE) {
        return 0;
    }
    // SAFETY: this is the system call that the caller asked for, with its own arguments.
    (unsafe { libc::syscall(libc::SYS_madvise, address, len, advice) }) as c_int
}

/// Maps the image over all of guest memory and registers it. Gives the userfaultfd, or the step that failed with its
/// errno, after which guest memory may be inaccessible.
fn attach(image: c_int) -> Result<c_int, (&'static str, c_int)> {
    let mut stat = core::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call writes one stat structure into the place for one.
    if unsafe { libc::fstat(image, stat.as_mut_ptr()) } != 0 {
        return Err(("look at the image", errno()));
    }
    // SAFETY: the call succeeded, so the structure is filled.
    let stat = unsafe { stat.assume_init() };
    if regions().iter().any(|region| region.offset() + region.size() > stat.st_size as u64) {
        return Err(("the image is smaller than guest memory", libc::EINVAL));
    }
    let uffd = abi::create(UFFD_DEVICE.load(Ordering::Relaxed)).map_err(|errno| ("create the userfaultfd", errno))?;
    for region in regions() {
        // On failure the descriptor stays open: regions before this one are registered with it.
        attach_region(region, image, uffd)?;
    }
    Ok(uffd)
}

fn attach_region(region: &Region, image: c_int, uffd: c_int) -> Result<(), (&'static str, c_int)> {
    let (base, len) = (region.base() as *mut c_void, region.size() as usize);
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    let mapped = raw_mmap(base, len, libc::PROT_NONE, flags, image, region.offset() as libc::off_t);
    if mapped == libc::MAP_FAILED {
        return Err(("map the image", errno()));
    }
    abi::register(uffd, region.base(), region.size()).map_err(|errno| ("register the mapping", errno))?;
    // SAFETY: the range is this library's own mapping; what it holds is not yet known to anybody.
    if unsafe { libc::mprotect(base, len, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
        return Err(("make the mapping accessible", errno()));
    }
    // A child of the VMM would see holes as zeros. Failure is harmless: the VMM is not allowed children.
    // SAFETY: advice on this library's own mapping.
    unsafe { libc::syscall(libc::SYS_madvise, base, len, libc::MADV_DONTFORK) };
    Ok(())
}

/// The argument of a thread that needs none.
const NOTHING: *mut c_void = null_mut();
