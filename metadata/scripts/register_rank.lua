-- Register or renew one rank of an engine, fenced by its incarnation (T5).
--
-- KEYS[1] ranks: rank -> JSON record; KEYS[2] retired incarnations (a sorted set by time)
-- ARGV: rank, incarnation, what the caller read before ('' for nothing), new record without epoch and lease
--       (JSON), lease in seconds, seconds that a retired incarnation and an ended lease are remembered,
--       most retired incarnations
-- Returns {'stale'}, {'changed'} (somebody registered in between: read again), or {'ok', epoch, 1 if new, end of
-- the lease, namespace and incarnation that the rank had before, both '' if none}.

local rank, incarnation, seen = ARGV[1], ARGV[2], ARGV[3]
local lease, remembered, most = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local now = tonumber(redis.call('TIME')[1])
if redis.call('ZSCORE', KEYS[2], rank .. '/' .. incarnation) then return {'stale'} end

local old = redis.call('HGET', KEYS[1], rank)
local record = cjson.decode(ARGV[4])
local epoch, new, was = 1, 1, {'', ''}
if old then
  old = cjson.decode(old)
  if old.digest .. '/' .. old.incarnation ~= seen then return {'changed'} end
  was = {old.namespace_id, old.incarnation}
  if old.incarnation == incarnation then
    new = 0
    epoch = old.epoch + (old.digest == record.digest and 0 or 1)
  else
    epoch = old.epoch + 1
    redis.call('ZADD', KEYS[2], now, rank .. '/' .. old.incarnation)
  end
elseif seen ~= '' then
  return {'changed'}
end
record.epoch = epoch
record.lease_until = now + lease
redis.call('HSET', KEYS[1], rank, cjson.encode(record))

-- Ranks that went without a word are dropped a day after their lease, an engine without any is gone by itself.
if new == 1 then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    if cjson.decode(all[i + 1]).lease_until < now - remembered then redis.call('HDEL', KEYS[1], all[i]) end
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - remembered)
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -most - 1)
end
redis.call('EXPIRE', KEYS[1], lease + remembered)
redis.call('EXPIRE', KEYS[2], lease + remembered)
return {'ok', epoch, new, record.lease_until, was[1], was[2]}
