#!lua flags=allow-oom
-- Takes a lock or an entry away from whoever has it, or from one holder only. Runs on a server without free memory as well.
-- KEYS: 1 the lock or entry
-- ARGV: 1 PUBLISH or SPUBLISH, 2 channel, 3 what to publish (nothing: an entry), 4 the token under which a
--       lock must be held (nothing: any)
-- Returns the same as look.lua; for what nobody holds an empty text.
local time = redis.call('TIME')
local now = time[1] .. string.sub('00000' .. time[2], -6)
local held = redis.pcall('GET', KEYS[1])
if type(held) ~= 'string' then return {now, '', -2} end
if ARGV[4] ~= '' and string.match(held, '^%x+:(%d+)!?$') ~= ARGV[4] then return {now, '', -2} end
local left = redis.call('PTTL', KEYS[1])
if ARGV[3] == '' then
  -- one that is in progress no longer, but may be completed late, is nobody's
  local till = string.match(held, '^[pc]:%x+:%d+:%d+:(%d+)$')
  if till and tonumber(till) <= tonumber(now) then return {now, '', -2} end
end
redis.call('DEL', KEYS[1])
if ARGV[3] ~= '' then redis.call(ARGV[1], ARGV[2], ARGV[3]) end
return {now, held, left}
