-- Register or renew one rank of an engine, fenced by its incarnation (T5).
--
-- KEYS[1] ranks: rank -> JSON record; KEYS[2] retired incarnations (a sorted set by time)
-- ARGV: rank, incarnation, what the caller read before ('' for nothing), new record without epoch and lease
--       (JSON), lease in seconds, seconds that a retired incarnation is remembered
-- Returns {'stale'}, {'changed'} (somebody registered in between: read again), or {'ok', epoch, 1 if new}.

local rank, incarnation, seen = ARGV[1], ARGV[2], ARGV[3]
local now = tonumber(redis.call('TIME')[1])
if redis.call('ZSCORE', KEYS[2], rank .. '/' .. incarnation) then return {'stale'} end

local old = redis.call('HGET', KEYS[1], rank)
local record = cjson.decode(ARGV[4])
local epoch, new = 1, 1
if old then
  old = cjson.decode(old)
  if old.digest .. '/' .. old.incarnation ~= seen then return {'changed'} end
  if old.incarnation == incarnation then
    new = 0
    epoch = old.epoch + (old.digest == record.digest and 0 or 1)
    record.read = old.read
  else
    epoch = old.epoch + 1
    redis.call('ZADD', KEYS[2], now, rank .. '/' .. old.incarnation)
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[6]))
    redis.call('EXPIRE', KEYS[2], ARGV[6])
  end
elseif seen ~= '' then
  return {'changed'}
end
record.epoch = epoch
record.lease_until = now + tonumber(ARGV[5])
redis.call('HSET', KEYS[1], rank, cjson.encode(record))
return {'ok', epoch, new}
