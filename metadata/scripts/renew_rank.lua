-- Renew a rank's lease, fenced by incarnation and epoch (T5).
--
-- KEYS[1] ranks; KEYS[2] retired incarnations
-- ARGV: rank, incarnation, epoch, lease in seconds
-- Returns 'ok', 'unknown' (register again) or 'stale'.

local rank, incarnation = ARGV[1], ARGV[2]
if redis.call('ZSCORE', KEYS[2], rank .. '/' .. incarnation) then return 'stale' end
local old = redis.call('HGET', KEYS[1], rank)
if not old then return 'unknown' end
local record = cjson.decode(old)
if record.incarnation ~= incarnation then return 'stale' end
if record.epoch ~= tonumber(ARGV[3]) then return 'unknown' end
record.lease_until = tonumber(redis.call('TIME')[1]) + tonumber(ARGV[4])
redis.call('HSET', KEYS[1], rank, cjson.encode(record))
return 'ok'
