-- Remove one rank, or all of an engine, fenced by incarnation where one is given; nothing leaves L3.
--
-- KEYS[1] ranks; KEYS[2] retired incarnations
-- ARGV: rank ('' for all), incarnation ('' for whichever), seconds that a retired incarnation is remembered
-- Returns {'ok', ranks left, {rank, its namespace, its incarnation of each that was removed}} or {'stale'}.

local now = tonumber(redis.call('TIME')[1])
local all = redis.call('HGETALL', KEYS[1])
local removed = {}
for i = 1, #all, 2 do
  local rank, record = all[i], cjson.decode(all[i + 1])
  if ARGV[1] == '' or rank == ARGV[1] then
    if ARGV[2] ~= '' and record.incarnation ~= ARGV[2] then return {'stale'} end
    redis.call('ZADD', KEYS[2], now, rank .. '/' .. record.incarnation)
    redis.call('HDEL', KEYS[1], rank)
    removed[#removed + 1] = rank
    removed[#removed + 1] = record.namespace_id
    removed[#removed + 1] = record.incarnation
  end
end
redis.call('EXPIRE', KEYS[2], ARGV[3])
return {'ok', redis.call('HLEN', KEYS[1]), removed}
