#!/bin/busybox sh
# The first process of the guest. The host's files are the root, read-only over 9p under a layer of memory, so
# that the guest runs this working tree with the host's Python. What to run is told on the kernel's command line:
# caketin.repo=FOLDER caketin.python=FILE caketin.number=1 (2 is the second machine of a pair)
b=/bin/busybox
$b mkdir -p /proc /sys /dev /lower /layer /new
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in /modules/*; do $b insmod "$module" || echo "insmod $module failed"; done
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose root /lower || echo "no root"
$b mount -t tmpfs layer /layer
$b mkdir /layer/upper /layer/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work overlay /new
$b mkdir -p /new/results /dev/shm /dev/pts
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=131072,cache=none results /new/results || echo "no results"
for word in $($b cat /proc/cmdline); do
  case $word in
    caketin.repo=*) repo=${word#*=} ;;
    caketin.python=*) python=${word#*=} ;;
    caketin.number=*) number=${word#*=} ;;
  esac
done
for m in /proc /sys /dev; do $b mount --move $m /new$m; done
exec $b switch_root /new /bin/sh "$repo/tests/rdma/guest/start.sh" "$repo" "$python" "$number"
