-- Remove one rank, or all of an engine, fenced by incarnation where one is given; nothing leaves L3.
--
-- KEYS[1] ranks; KEYS[2] retired incarnations
-- ARGV: rank ('' for all), incarnation ('' for whichever), seconds that a retired incarnation is remembered
-- Returns {'ok', ranks left} or {'stale'}.

local now = tonumber(redis.call('TIME')[1])
local function retire(rank, record)
  redis.call('ZADD', KEYS[2], now, rank .. '/' .. record.incarnation)
  redis.call('EXPIRE', KEYS[2], ARGV[3])
  redis.call('HDEL', KEYS[1], rank)
end

local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local record = cjson.decode(all[i + 1])
  if all[i] == ARGV[1] and ARGV[2] ~= '' and record.incarnation ~= ARGV[2] then return {'stale'} end
  if ARGV[1] == '' or all[i] == ARGV[1] then retire(all[i], record) end
end
return {'ok', redis.call('HLEN', KEYS[1])}
