-- Add what one process has counted, exactly once however often it is sent (C1, C2).
--
-- A process numbers its flushes. The number of the last one that was taken stands in one hash with the time at
-- which it was taken, so that a repeated flush is known, and so that a process that went silent without a goodbye
-- leaves a gap: its counts after that time, of at most one interval, are lost.
-- A lookup with a request id counts only where nobody counted that id before; the id and the count are one step.
--
-- KEYS[1] processes: process -> 'number milliseconds interval'; KEYS[2] gaps: the same of processes that went
--         silent; then `buckets` hashes of counters (row -> pages); then one key a request id
-- ARGV[1] msgpack {
--   process, number, interval_ms
--   goodbye      whether this is the process's last word
--   silent_ms    a process that is silent for longer has gone
--   buckets      how many hashes of counters; ttl: {seconds, ...} of each
--   rows         {row, ...}; others: {row that counts in its place when a hash has `max_rows` rows, ...}
--   counts       {{places of hashes}, {place of row, pages, ...}}, ...
--   asked        {place of the request's key, {places of hashes}, {place of row, pages, ...}}, ...
--   request_s    how long a request id is remembered
--   max_rows, max_gaps, gap_ms
-- }
-- Returns 1 where it was taken, 0 where it had been taken before.

local call = cmsgpack.unpack(ARGV[1])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local processes, gaps = KEYS[1], KEYS[2]

local function read(entry)
  local number, at, interval = string.match(entry, '^(%d+) (%d+) (%d+)$')
  return tonumber(number), tonumber(at), tonumber(interval)
end

local function add(bucket, row, pages)
  local key, name = KEYS[2 + bucket], call.rows[row]
  if redis.call('HEXISTS', key, name) == 0 and redis.call('HLEN', key) >= call.max_rows then
    name = call.others[row]
  end
  -- A counter only ever grows; at the end of 64 bits it stays there.
  local done = redis.pcall('HINCRBY', key, name, string.format('%.0f', pages))
  if type(done) == 'table' and done.err then
    redis.call('HSET', key, name, '9223372036854775807')
  end
end

local function give_up_the_silent()
  local all, lost = redis.call('HGETALL', processes), false
  for i = 1, #all, 2 do
    local _, at = read(all[i + 1])
    if all[i] ~= call.process and now - at > call.silent_ms then
      redis.call('HDEL', processes, all[i])
      redis.call('HSET', gaps, all[i], all[i + 1])
      lost = true
    end
  end
  if not lost then return end
  local known = redis.call('HGETALL', gaps)
  local oldest_first = {}
  for i = 1, #known, 2 do
    local _, at = read(known[i + 1])
    oldest_first[#oldest_first + 1] = {at, known[i]}
  end
  table.sort(oldest_first, function(a, b) return a[1] < b[1] end)
  for i, gap in ipairs(oldest_first) do
    if i <= #oldest_first - call.max_gaps or now - gap[1] > call.gap_ms then redis.call('HDEL', gaps, gap[2]) end
  end
end

local before = redis.call('HGET', processes, call.process) or redis.call('HGET', gaps, call.process)
local taken = 0
if not before or read(before) < call.number then
  taken = 1
  local sums = {}
  for i = 1, call.buckets do sums[i] = {} end
  local function collect(places, flat)
    for _, bucket in ipairs(places) do
      local sum = sums[bucket]
      for i = 1, #flat, 2 do sum[flat[i]] = (sum[flat[i]] or 0) + flat[i + 1] end
    end
  end
  for _, counted in ipairs(call.counts) do collect(counted[1], counted[2]) end
  for _, asked in ipairs(call.asked) do
    local key = KEYS[2 + call.buckets + asked[1]]
    if redis.call('SET', key, '', 'NX', 'EX', call.request_s) then collect(asked[2], asked[3]) end
  end
  for bucket, sum in ipairs(sums) do
    for row, pages in pairs(sum) do add(bucket, row, pages) end
    redis.call('EXPIRE', KEYS[2 + bucket], call.ttl[bucket])
  end
end

redis.call('HDEL', gaps, call.process)
if call.goodbye then
  redis.call('HDEL', processes, call.process)
else
  local entry = string.format('%.0f %.0f %.0f', call.number, now, call.interval_ms)
  redis.call('HSET', processes, call.process, entry)
end
give_up_the_silent()
return taken
