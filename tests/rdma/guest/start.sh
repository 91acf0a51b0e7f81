#!/bin/sh
# Second step of the guest: network, soft-RoCE devices, the cases; then off.
repo=$1 python=$2 number=$3
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 LD_PRELOAD=/results/noted_verbs.so
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /var/tmp
ulimit -l unlimited
echo 3 >/proc/sys/kernel/printk
ip link set lo up
ip link set eth0 up && ip addr add "192.168.77.$number/24" dev eth0
ip link set eth1 up && ip addr add "192.168.78.$number/24" dev eth1
ip link set eth2 up && ip addr add 10.0.2.15/24 dev eth2 && ip route add default via 10.0.2.2
rdma link add rxe0 type rxe netdev eth0 || echo "no rxe0"
rdma link add rxe1 type rxe netdev eth1 || echo "no rxe1"
chmod 666 /dev/infiniband/uverbs*
cd "$repo" && "$python" -m tests.rdma.guest.run "$number"
sync
echo o >/proc/sysrq-trigger
while :; do :; done
