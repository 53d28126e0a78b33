/* A disk that is slow, fails, or lies: preloaded into a server (LD_PRELOAD), which then calls these
   functions instead of the C library's. What the disk does is in a page of memory that the test
   shares through the file CAMPAIGN_DISK; `tests/campaign/broken_disk.py` has the same layout. Only
   files below `folder` are concerned.

   Syncs of Linux AIO go through syscall(2) by number, so that function is here as well:

       slow    a thread submits the request later, and io_getevents waits for it as for a disk
       lies    the request names a file of memory, whose sync succeeds and does nothing
       fails   the same, and io_getevents gives the error for its event
*/

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define BLOCKS_MAX 64
#define REQUESTS_MAX 16

struct bad_block {
    uint64_t inode;
    uint64_t number;
    _Atomic uint64_t is_written_anew;
};

struct page {
    _Atomic uint32_t sync_delay_ms;
    _Atomic uint32_t write_delay_ms;
    _Atomic uint32_t sync_lies;
    _Atomic uint32_t sync_errno;
    _Atomic uint32_t write_errno;
    _Atomic uint32_t bad_blocks;
    uint32_t unused[2];
    _Atomic uint64_t syncs_slowed;
    _Atomic uint64_t syncs_failed;
    _Atomic uint64_t syncs_lied;
    _Atomic uint64_t writes_slowed;
    _Atomic uint64_t writes_failed;
    _Atomic uint64_t reads_failed;
    char unused2[1024 - 80];
    char folder[1024];
    struct bad_block blocks[BLOCKS_MAX];
};

static struct page *page;
static int nowhere = -1;
static _Atomic uintptr_t failing[REQUESTS_MAX];

#define NEXT(name)                                                                                 \
    ({                                                                                             \
        static void *found;                                                                        \
        if (!found)                                                                                \
            found = dlsym(RTLD_NEXT, #name);                                                       \
        (__typeof__(&name))found;                                                                  \
    })

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("CAMPAIGN_DISK");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *found = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED)
        return;
    nowhere = memfd_create("nowhere", MFD_CLOEXEC);
    page = found;
}

static int is_ours(int file)
{
    char link[64] = "/proc/self/fd/", path[PATH_MAX], digits[16];
    int at = 0, number = file;
    if (!page || file < 0)
        return 0;
    do /* without stdio, which may be in the middle of something */
        digits[at++] = (char)('0' + number % 10);
    while (number /= 10);
    for (size_t end = strlen(link); at; end++) {
        link[end] = digits[--at];
        link[end + 1] = 0;
    }
    ssize_t size = readlink(link, path, sizeof path - 1);
    size_t length = strlen(page->folder);
    return size > (ssize_t)length && !strncmp(path, page->folder, length);
}

static void pause_ms(uint32_t milliseconds)
{
    struct timespec left = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* --- syncs ------------------------------------------------------------------------------------ */

static int synced(int file, int (*really)(int))
{
    if (!page || !(page->sync_delay_ms || page->sync_lies || page->sync_errno) || !is_ours(file))
        return really(file);
    if (page->sync_delay_ms) {
        page->syncs_slowed++;
        pause_ms(page->sync_delay_ms);
    }
    if (page->sync_lies) {
        page->syncs_lied++;
        return 0;
    }
    if (page->sync_errno) {
        page->syncs_failed++;
        errno = (int)page->sync_errno;
        return -1;
    }
    return really(file);
}

int fsync(int file) { return synced(file, NEXT(fsync)); }

int fdatasync(int file) { return synced(file, NEXT(fdatasync)); }

int syncfs(int file) { return synced(file, NEXT(syncfs)); }

/* --- syncs of Linux AIO ----------------------------------------------------------------------- */

static int is_sync(const struct iocb *request)
{
    int kind = request->aio_lio_opcode;
    return (kind == IOCB_CMD_FDSYNC || kind == IOCB_CMD_FSYNC) && is_ours((int)request->aio_fildes);
}

static void will_fail(struct iocb *request)
{
    for (int at = 0; at < REQUESTS_MAX; at++) {
        uintptr_t empty = 0;
        if (atomic_compare_exchange_strong(&failing[at], &empty, (uintptr_t)request))
            return;
    }
    abort(); /* more requests at a time than are known here */
}

static int fails(uintptr_t request)
{
    for (int at = 0; at < REQUESTS_MAX; at++) {
        uintptr_t wanted = request;
        if (atomic_compare_exchange_strong(&failing[at], &wanted, 0))
            return 1;
    }
    return 0;
}

static long submitted(long context, long count, struct iocb **requests)
{
    long done = 0;
    for (; done < count; done++) {
        struct iocb *request = requests[done];
        uint32_t file = request->aio_fildes;
        int is_one = is_sync(request);
        if (is_one && page->sync_lies) {
            page->syncs_lied++;
            request->aio_fildes = (uint32_t)nowhere;
        } else if (is_one && page->sync_errno) {
            page->syncs_failed++;
            will_fail(request);
            request->aio_fildes = (uint32_t)nowhere;
        }
        long taken = NEXT(syscall)(SYS_io_submit, context, 1L, &request);
        requests[done]->aio_fildes = file;
        if (taken != 1)
            return done ? done : taken;
    }
    return done;
}

struct later {
    long context, count;
    uint32_t delay_ms;
    struct iocb *requests[];
};

static void *submit_later(void *given)
{
    struct later *later = given;
    pause_ms(later->delay_ms);
    for (long done = 0; done < later->count;) {
        long more = submitted(later->context, later->count - done, later->requests + done);
        if (more > 0)
            done += more;
        else if (errno != EAGAIN && errno != EINTR)
            abort(); /* the caller was told that the kernel took the request */
    }
    free(later);
    return NULL;
}

static long submit(long context, long count, struct iocb **requests)
{
    uint32_t delay_ms = page->sync_delay_ms;
    int has_sync = 0;
    for (long at = 0; at < count; at++)
        has_sync |= is_sync(requests[at]);
    if (!has_sync || !delay_ms)
        return submitted(context, count, requests);
    struct later *later = malloc(sizeof *later + (size_t)count * sizeof *requests);
    pthread_t thread;
    if (!later)
        return submitted(context, count, requests);
    later->context = context, later->count = count, later->delay_ms = delay_ms;
    memcpy(later->requests, requests, (size_t)count * sizeof *requests);
    if (pthread_create(&thread, NULL, submit_later, later)) {
        free(later);
        return submitted(context, count, requests);
    }
    pthread_detach(thread);
    page->syncs_slowed++;
    return count;
}

long syscall(long number, ...)
{
    long words[6];
    va_list list;
    va_start(list, number);
    for (int at = 0; at < 6; at++)
        words[at] = va_arg(list, long);
    va_end(list);
    if (page && number == SYS_io_submit)
        return submit(words[0], words[1], (struct iocb **)words[2]);
    long done =
        NEXT(syscall)(number, words[0], words[1], words[2], words[3], words[4], words[5]);
    if (page && number == SYS_io_getevents)
        for (long at = 0; at < done; at++) {
            struct io_event *event = (struct io_event *)words[3] + at;
            if (fails((uintptr_t)event->obj))
                event->res = -(int64_t)EIO;
        }
    return done;
}

/* --- writes and reads ------------------------------------------------------------------------- */

static struct bad_block *bad_in(int file, off_t at, size_t size, int in_part)
{
    struct stat found;
    if (!page || !page->bad_blocks || !size || !is_ours(file) || fstat(file, &found))
        return NULL;
    uint64_t begin = (uint64_t)at, end = begin + size;
    for (uint32_t each = 0; each < page->bad_blocks && each < BLOCKS_MAX; each++) {
        struct bad_block *block = &page->blocks[each];
        uint64_t first = block->number * BLOCK;
        int is_whole = begin <= first && first + BLOCK <= end;
        if (block->inode == found.st_ino && !block->is_written_anew && begin < first + BLOCK &&
            first < end && !(in_part && is_whole))
            return block;
    }
    return NULL;
}

static int may_write(int file, off_t at, size_t size)
{
    if (bad_in(file, at, size, 1)) { /* the rest of the block would have to be read */
        page->reads_failed++;
        errno = EIO;
        return 0;
    }
    if (!page || !(page->write_delay_ms || page->write_errno) || !is_ours(file))
        return 1;
    if (page->write_delay_ms) {
        page->writes_slowed++;
        pause_ms(page->write_delay_ms);
    }
    if (page->write_errno) {
        page->writes_failed++;
        errno = (int)page->write_errno;
        return 0;
    }
    return 1;
}

static ssize_t written(int file, off_t at, ssize_t size)
{
    struct bad_block *block;
    if (size > 0 && page && page->bad_blocks)
        while ((block = bad_in(file, at, (size_t)size, 0)))
            block->is_written_anew = 1;
    return size;
}

static int may_read(int file, off_t at, size_t size)
{
    if (!page || !page->bad_blocks || !bad_in(file, at, size, 0))
        return 1;
    page->reads_failed++;
    errno = EIO;
    return 0;
}

static size_t sum(const struct iovec *parts, int count)
{
    size_t found = 0;
    for (int at = 0; at < count; at++)
        found += parts[at].iov_len;
    return found;
}

#define WRITES(name, call, at, size, ...)                                                             \
    ssize_t name(__VA_ARGS__)                                                                      \
    {                                                                                              \
        return may_write(file, at, size) ? written(file, at, NEXT(name) call) : -1;                \
    }
#define READS(name, call, at, size, ...)                                                           \
    ssize_t name(__VA_ARGS__)                                                                      \
    {                                                                                              \
        return may_read(file, at, size) ? NEXT(name) call : -1;                                    \
    }

WRITES(pwrite, (file, data, size, at), at, size, int file, const void *data, size_t size, off_t at)
WRITES(pwrite64, (file, data, size, at), at, size, int file, const void *data, size_t size,
       off64_t at)
WRITES(pwritev, (file, parts, n, at), at, sum(parts, n), int file, const struct iovec *parts, int n,
       off_t at)
WRITES(pwritev64, (file, parts, n, at), at, sum(parts, n), int file, const struct iovec *parts,
       int n, off64_t at)
WRITES(pwritev2, (file, parts, n, at, flags), at, sum(parts, n), int file,
       const struct iovec *parts, int n, off_t at, int flags)
WRITES(pwritev64v2, (file, parts, n, at, flags), at, sum(parts, n), int file,
       const struct iovec *parts, int n, off64_t at, int flags)
READS(pread, (file, data, size, at), at, size, int file, void *data, size_t size, off_t at)
READS(pread64, (file, data, size, at), at, size, int file, void *data, size_t size, off64_t at)
READS(preadv, (file, parts, n, at), at, sum(parts, n), int file, const struct iovec *parts, int n,
      off_t at)
READS(preadv64, (file, parts, n, at), at, sum(parts, n), int file, const struct iovec *parts,
      int n, off64_t at)
READS(preadv2, (file, parts, n, at, flags), at, sum(parts, n), int file,
      const struct iovec *parts, int n, off_t at, int flags)
READS(preadv64v2, (file, parts, n, at, flags), at, sum(parts, n), int file,
      const struct iovec *parts, int n, off64_t at, int flags)

/* Blocks behind the new end of a file are free, and what is written there gets others. */
static int cut(int file, off_t size, int result)
{
    struct bad_block *block;
    off_t begin = (size + BLOCK - 1) / BLOCK * BLOCK;
    if (!result && page && page->bad_blocks)
        while ((block = bad_in(file, begin, SIZE_MAX / 4, 0)))
            block->is_written_anew = 1;
    return result;
}

int ftruncate(int file, off_t size) { return cut(file, size, NEXT(ftruncate)(file, size)); }

int ftruncate64(int file, off64_t size) { return cut(file, size, NEXT(ftruncate64)(file, size)); }

ssize_t write(int file, const void *data, size_t size)
{
    off_t at = page && page->bad_blocks ? lseek(file, 0, SEEK_CUR) : 0;
    return may_write(file, at, size) ? written(file, at, NEXT(write)(file, data, size)) : -1;
}

ssize_t read(int file, void *data, size_t size)
{
    off_t at = page && page->bad_blocks ? lseek(file, 0, SEEK_CUR) : 0;
    return at < 0 || may_read(file, at, size) ? NEXT(read)(file, data, size) : -1;
}
