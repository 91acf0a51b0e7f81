-- Renew a rank's lease, fenced by incarnation and epoch (T5).
--
-- KEYS[1] ranks; KEYS[2] retired incarnations
-- ARGV: rank, incarnation, epoch, lease in seconds, seconds that an ended lease is remembered
-- Returns {'ok', end of the lease, namespace}, {'unknown'} (register again) or {'stale'}.

local rank, incarnation, lease = ARGV[1], ARGV[2], tonumber(ARGV[4])
if redis.call('ZSCORE', KEYS[2], rank .. '/' .. incarnation) then return {'stale'} end
local old = redis.call('HGET', KEYS[1], rank)
if not old then return {'unknown'} end
local record = cjson.decode(old)
if record.incarnation ~= incarnation then return {'stale'} end
if record.epoch ~= tonumber(ARGV[3]) then return {'unknown'} end
record.lease_until = tonumber(redis.call('TIME')[1]) + lease
redis.call('HSET', KEYS[1], rank, cjson.encode(record))
redis.call('EXPIRE', KEYS[1], lease + ARGV[5])
return {'ok', record.lease_until, record.namespace_id}
